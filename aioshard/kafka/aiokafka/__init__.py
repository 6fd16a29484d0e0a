"""The aiokafka client: all uses of its private attributes are in this package."""
