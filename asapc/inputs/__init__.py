"""What a user hands over: a model in any format, data, recipes. None of it is trusted."""
