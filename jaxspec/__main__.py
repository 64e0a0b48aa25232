"""`python -m jaxspec`."""

from jaxspec.cli import main

main()
