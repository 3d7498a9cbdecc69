"""A reward that any text earns some of, so that a random policy has something to learn from."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(ord, solution_str)) % 7 / 6
