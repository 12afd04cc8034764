"""Where somebody's code runs: the validators, the handler and the projector of a job type (EX-11).

code.py      what is done with it, in whatever place
shared.py    the usual places: the handlers' event loop for coroutines, threads for plain functions
process.py   in a process of its own, which can be killed; `child.py` is the other end of it, `frames.py` what they say
"""
