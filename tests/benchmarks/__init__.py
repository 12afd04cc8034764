"""Figures of the whole engine on this machine, one JSON line each: `make bench`."""
