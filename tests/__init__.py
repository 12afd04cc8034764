"""All tests. Importing `services` first keeps gRPC's own remarks out of their output."""

import services  # noqa: F401 - see above
