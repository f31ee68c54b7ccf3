"""Predictions of deployments before anyone has measured them, sealed, and their score afterwards."""
