"""Yunque: the GLM-5 system (model, training, weights, text) as one Python package."""

__version__ = "0.1.0"
