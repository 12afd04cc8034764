"""The job types that come with aijobs, found through entry points exactly as a third party's would be."""
