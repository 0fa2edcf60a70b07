"""Tools for prepared data: inspect, merge, repair and split."""
