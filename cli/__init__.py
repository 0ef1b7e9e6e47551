"""The command line of `gdn`, installed as `gdn.cli`. It shows what the library finds and computes nothing."""
