"""The bridge to Keras: models as values that travel, their variables as arrays, and the hook in their optimizer."""
