"""The execution engine: five stages over one value, one file each (EX-1).

PREPARE takes the lease, RESOLVE finds what the run needs, EXECUTE calls the handler and validates, PROJECT makes the
artifacts, COMPLETE reports. `engine.py` is the list of them.
"""
