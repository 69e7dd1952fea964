"""GPUs: which ranks get which devices."""
