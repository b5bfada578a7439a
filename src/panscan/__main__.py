"""``python -m panscan``."""

from panscan.cli.main import main

main()
