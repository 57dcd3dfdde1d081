"""Real environments behind one interface."""
