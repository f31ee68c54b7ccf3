"""Fused ops on one GPU: what each computes, holds and exchanges under its choice."""
