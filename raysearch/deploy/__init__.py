"""From a question to a running deployment: recommendations, pools, placements, exports, tuning on the real machine."""
