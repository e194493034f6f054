"""The life of a request and the choice of instances. Pure: events in, instructions out; time and seeds are arguments."""
