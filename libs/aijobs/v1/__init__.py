"""Generated from `protos/aijobs/v1`; never edited by hand (`make protos`)."""
