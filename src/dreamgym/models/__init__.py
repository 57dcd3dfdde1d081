"""Language models behind one role: local weights (`local`), a small one from a corpus (`tiny`), endpoints.

This package imports nothing by itself, so that a remote model costs no import of torch.
"""
