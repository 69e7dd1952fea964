"""Gossip: workers that average their weights in pairs, without a server. Knows neither Keras nor Spark."""
