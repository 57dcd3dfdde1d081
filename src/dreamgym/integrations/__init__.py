"""Adapters to other libraries. Each needs its own extra and is imported only when used."""
