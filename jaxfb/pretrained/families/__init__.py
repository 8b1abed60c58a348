"""Describes the architectures of transformers, one a file; `jaxfb.pretrained.architectures` lists them."""
