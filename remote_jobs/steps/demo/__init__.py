"""What `orch demo` needs torch for: making a small model and checking the states, run as programs of their own."""
