"""What can be read off a text without understanding it: its heading, sentences and most frequent terms.

Everything is counted, nothing is learnt: a term matters if it is frequent and no stop word, a sentence if its terms
matter. Made for languages that put blanks between words.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import sqrt

#: What is beyond is not read: the offline provider is for demonstrations.
LONGEST_TEXT = 200_000
#: A first line up to this length without a full stop is a heading.
_LONGEST_HEADING = 120
_SHORTEST_SENTENCE = 4
_SHORTEST_TERM = 3

_STOP_WORDS = frozenset(
    """a about above after again against all almost also although always am among an and another any are around as at
    back be became because become been before began being below between both but by came can cannot come could did do
    does doing done down during each either else enough even ever every few first for found from further gave get
    gets give given go goes going gone got had has have having he her here hers him himself his how however i if in
    indeed instead into is it its itself just keep kept know known last later least less let like little long made
    make makes making many may me might mine more most much must my near need neither never new next no nor not
    nothing now of off often old on once one only onto or other others our out over own part per perhaps put quite
    rather really said same saw say says second see seem seemed seems seen several shall she should since so some
    something still such take taken takes taking ten than that the their them then there these they thing things
    this those though three through thus to together too took toward two under until up upon us use used uses using
    usually very want was way we well went were what when where whether which while who whole whom whose why will
    with within without would year years yet you your""".split()  # noqa: SIM905 - as a list it would take 250 lines
)
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])-?\d{1,15}(?:\.\d{1,6})?(?![\w])")
_CAPITALISED = r"[A-Z][\w\u2019'-]*"
_NAME = re.compile(rf"{_CAPITALISED}(?: (?:(?:of|the|de|van|von) )*{_CAPITALISED})*")
_END_OF_SENTENCE = re.compile(
    r"""(?<=[.!?…])["'\u201d\u2019)\]]*\s+(?=["'\u201c\u2018(\[]?[A-Z0-9])|(?<=[\u3002\uff01\uff1f])"""
)
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|No|vs|etc|cf|Fig|approx|e\.g|i\.e)|\b[A-Z])\.$")
_MARK_UP = re.compile(r"^\s{0,3}(?:#{1,6}\s+|>\s?|[-*+]\s+|\d{1,3}[.)]\s+)")
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+(.+?)\s*#*$")
_LIST_ITEM = re.compile(r"^\s{0,3}(?:[-*+]|\d{1,3}[.)])\s+")
_INLINE = (
    (re.compile(r"!?\[([^\]\n]*)\]\([^)\s]*\)"), r"\1"),
    (re.compile(r"(\*\*|__|`)([^\n]+?)\1"), r"\2"),
    (re.compile(r"(?<!\w)[*_]([^\s*_][^*_\n]*?)[*_](?!\w)"), r"\1"),
)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def stem(word: str) -> str:
    """Bring plural and singular together: enough to count, too coarse to show."""
    if len(word) > _SHORTEST_TERM + 1 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > _SHORTEST_TERM + 1 and word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    if len(word) > _SHORTEST_TERM and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def terms(text: str) -> list[str]:
    """Return the stems of the words that carry meaning, in order."""
    return [stem(word) for word in words(text) if len(word) >= _SHORTEST_TERM and word not in _STOP_WORDS]


@dataclass(frozen=True)
class Document:
    """A text, taken apart. `parts` of it rank with the whole text's frequencies."""

    heading: str
    paragraphs: Sequence[Sequence[str]]
    frequency: Counter[str] = field(repr=False)

    @classmethod
    def of(cls, text: str) -> "Document":
        """Take a plain or Markdown text apart."""
        heading, paragraphs = _paragraphs(text[:LONGEST_TEXT])
        frequency = Counter(term for paragraph in paragraphs for sentence in paragraph for term in terms(sentence))
        frequency.update(terms(heading))
        return cls(heading, paragraphs, frequency)

    @cached_property
    def sentences(self) -> Sequence[str]:
        """All sentences, in order."""
        return [sentence for paragraph in self.paragraphs for sentence in paragraph]

    @cached_property
    def ranked(self) -> Sequence[str]:
        """The sentences, the most telling first; the earlier one where two are equal."""
        openings = {paragraph[0] for paragraph in self.paragraphs if paragraph}
        scores = [self._score(sentence, index, sentence in openings) for index, sentence in enumerate(self.sentences)]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return [self.sentences[index] for index in order]

    def _score(self, sentence: str, index: int, opening: bool) -> float:
        found = terms(sentence)
        if len(found) < _SHORTEST_SENTENCE:
            return 0
        weight = sum(sqrt(self.frequency[term]) for term in set(found)) / sqrt(len(found) + 8)
        return weight * (1.25 if index == 0 else 1.1 if opening else 1)

    def best(self, count: int) -> list[str]:
        """Return the most telling sentences, in the order of the text."""
        chosen = set(self.ranked[:count])
        return [sentence for sentence in dict.fromkeys(self.sentences) if sentence in chosen]

    @cached_property
    def title(self) -> str:
        """The heading, else the first sentence."""
        return self.heading or next(iter(self.sentences), "")

    @cached_property
    def keywords(self) -> Sequence[str]:
        """The terms, the most frequent first, as the text writes them; phrases of two words where they recur."""
        surface: dict[str, Counter[str]] = {}
        pairs: Counter[tuple[str, str]] = Counter()
        first: dict[str, int] = {}
        for text in (self.heading, *self.sentences):
            before: tuple[str, int] | None = None
            for match in _WORD.finditer(text):
                word = match[0].lower()
                if len(word) < _SHORTEST_TERM or word in _STOP_WORDS:
                    before = None
                    continue
                key = stem(word)
                surface.setdefault(key, Counter())[match[0]] += 1
                first.setdefault(key, len(first))
                if before is not None and match.start() == before[1] + 1:
                    pairs[before[0], key] += 1
                before = (key, match.end())
        single = sorted(first, key=lambda key: (-self.frequency[key], first[key]))
        shown = {key: _shown(forms) for key, forms in surface.items()}
        return _with_phrases(single, pairs, shown)

    @cached_property
    def names(self) -> Sequence[str]:
        """What is written with capitals within a sentence, the most frequent first."""
        found: Counter[str] = Counter()
        for sentence in self.sentences:
            for match in _NAME.finditer(sentence, 1):
                name = match[0].removesuffix("'s").removesuffix("\u2019s")
                starts_word = not sentence[match.start() - 1].isalnum()
                if starts_word and len(name) >= _SHORTEST_TERM and name.lower() not in _STOP_WORDS:
                    found[name] += 1
        return [name for name, _ in found.most_common()]

    @cached_property
    def numbers(self) -> Sequence[tuple[float, str]]:
        """The numbers, each with the sentence that it stands in."""
        return [
            (float(match[0].replace(",", "")), sentence)
            for sentence in (self.heading, *self.sentences)
            for match in _NUMBER.finditer(sentence)
        ]

    @cached_property
    def word_count(self) -> int:
        """Words in all."""
        return sum(len(sentence.split()) for sentence in self.sentences)

    def overlap(self, text: str) -> float:
        """Tell which share of a text's terms the document has, from 0 to 1."""
        wanted = set(terms(text))
        return len(wanted & self.frequency.keys()) / len(wanted) if wanted else 0.0

    def closest(self, text: str, sentences: Iterable[str]) -> str | None:
        """Return the sentence that shares most with a text; None if none shares anything."""
        wanted = set(terms(text))
        best, most = None, 0.0
        for sentence in sentences:
            found = set(terms(sentence))
            score = len(wanted & found) / sqrt(len(found) + 1)
            if score > most:
                best, most = sentence, score
        return best

    def parts(self, count: int) -> list["Document"]:
        """Divide the text into consecutive parts of about equal length: paragraphs if there are enough of them."""
        pieces: list[Sequence[str]] = [paragraph for paragraph in self.paragraphs if paragraph]
        if len(pieces) < count:
            pieces = [[sentence] for sentence in self.sentences] or [[]]
        count = max(1, min(count, len(pieces)))
        edges = [round(index * len(pieces) / count) for index in range(count + 1)]
        return [Document("", pieces[start:end], self.frequency) for start, end in pairwise(edges)]


def _shown(forms: Counter[str]) -> str:
    # A capital may only mean that a sentence begins, unless the word is never without one.
    small = {form for form in forms if form.islower()} or forms.keys()
    return min(small, key=lambda form: (-forms[form], len(form), form))


def _with_phrases(single: list[str], pairs: Counter[tuple[str, str]], shown: dict[str, str]) -> list[str]:
    recurring = [pair for pair, times in pairs.most_common() if times > 1]
    result: list[str] = []
    used: set[str] = set()
    for key in single:
        if key in used:
            continue
        phrase = next((pair for pair in recurring if key in pair and not used & set(pair)), (key,))
        used.update(phrase)
        result.append(" ".join(shown[part] for part in phrase))
    return result


def _paragraphs(text: str) -> tuple[str, list[list[str]]]:
    heading = ""
    paragraphs: list[list[str]] = []
    block: list[str] = []

    def end_block() -> None:
        sentences = _sentences(" ".join(block))
        if sentences:
            paragraphs.append(sentences)
        block.clear()

    lines = [*text.replace("\r\n", "\n").split("\n"), ""]
    for number, line in enumerate(lines):
        marked = _HEADING.match(line)
        plain = _plain(line)
        if marked or not plain:
            end_block()
            if marked and not heading:
                heading = plain
        elif not heading and not paragraphs and not block and _is_heading(plain, lines[number + 1 : number + 2]):
            heading = plain
        else:
            if _LIST_ITEM.match(line):
                end_block()
            block.append(plain)
    return heading, paragraphs


def _is_heading(line: str, following: Sequence[str]) -> bool:
    alone = not any(_plain(next_line) for next_line in following)
    return alone and len(line) <= _LONGEST_HEADING and line[-1] not in ".!?…:;,\u3002\uff01\uff1f"


def _plain(line: str) -> str:
    line = _MARK_UP.sub("", line)
    for pattern, replacement in _INLINE:
        line = pattern.sub(replacement, line)
    return " ".join(line.split())


def _sentences(text: str) -> list[str]:
    sentences: list[str] = []
    start = 0
    for end in _END_OF_SENTENCE.finditer(text):
        if _ABBREVIATION.search(text[max(start, end.start() - 10) : end.start()]):
            continue
        sentences.append(text[start : end.end()].strip())
        start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]
