"""Advice: model, ranks and links -> codecs, with the predicted time of a step. The formula opens model.py."""
