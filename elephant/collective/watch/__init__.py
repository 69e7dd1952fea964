"""The ranks' watch over each other: who has died, failed or left, and how the others learn of it."""
