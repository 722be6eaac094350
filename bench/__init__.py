"""The figures that README and issues state, measured: `make bench`, or `python -m bench [section ...]`."""
