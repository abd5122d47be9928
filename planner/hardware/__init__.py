"""What a job runs on: GPUs, links, prices, what a driver tells, and which kernels a card has."""
