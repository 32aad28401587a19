"""Protocols that score a trained model once, and the tables, figures and pages made of the scores.

Tables, figures and pages read result rows and saved fields only, never a model.
"""
