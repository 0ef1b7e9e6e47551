"""`python -m gdn`: the command line, also from a checkout that is not installed."""

from gdn.cli.main import main

main()
