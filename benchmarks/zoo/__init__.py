"""Every architecture of transformers and diffusers, captured, planned and compared."""
