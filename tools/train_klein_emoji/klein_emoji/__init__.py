"""Training code of klein-emoji: a tiny text-to-image model with the architecture and checkpoint layout of FLUX.2 Klein.

Plain PyTorch. Modules carry the parameter names of diffusers and transformers, so that saving is a plain dump.
"""
