"""A database, a broker and our services as processes of this machine: for the tests and for `make up`."""
