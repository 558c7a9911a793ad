"""A reward of your own: the share of letters in their place, so that a nearly right word teaches too. A dict: `reward.key` is what is trained on."""


def near(args, sample):
    right = sum(a == b for a, b in zip(sample.response, sample.label))
    return {"near": right / max(len(sample.label), len(sample.response), 1), "exact": float(sample.response == sample.label)}
