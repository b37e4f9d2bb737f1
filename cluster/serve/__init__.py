"""What runs on Ray Serve: deployments, the way of calls between replicas, the hub's actor."""
