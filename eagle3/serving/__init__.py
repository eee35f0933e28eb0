"""Servers of our own: started, watched and always stopped. The only package that knows vLLM."""
