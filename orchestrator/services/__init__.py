"""One verb a file: what the commands do, callable from Python too. No rendering in here, no terminal."""
