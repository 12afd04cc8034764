"""The three services, the embedded engine and the command line. Import packages, not an API."""

import os

# The C core of gRPC writes remarks of its own to stderr, between our JSON lines; it reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
