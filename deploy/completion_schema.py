"""Write `docs/completion-event.schema.json`, the JSON Schema of the message that tells of a job's end, or check it."""

import json
import sys

from aijobs.completion import json_schema
from deploy.pages import ROOT, write_or_check

PAGE = ROOT / "docs" / "completion-event.schema.json"


def page() -> str:
    """Return the whole file."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), about=__doc__))
