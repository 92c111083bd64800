"""The claims that studies judge: the sentence, where it comes from, the paper's own numbers, and the premise.

A verdict needs its premise: where the baseline has not learned its task, or two metrics disagree, nothing is decided.
"""

from dataclasses import dataclass

VISION = "Wortsman et al. 2023"
TEXT = "Shen et al. 2023"
OURS = "a question of ours, which neither paper answers"

# What a softmax baseline must reach before it is worth comparing with, by data set; stated before the runs.
ACCURACY_BARS = {"fashion-mnist": 0.80, "fashion-mnist-small": 0.75, "cifar10": 0.50}
LARGEST_BARS = {"cifar10": 0.75}  # and the largest model of a study over sizes
BLEU_BAR = 20.0

MATCH = "Does it match softmax?"
SET = "What must be set?"
FASTER = "Is it faster?"
ATTENTION = "Does text follow?"
MEMORY = "And in the feed-forward layer?"
GROUPS = (MATCH, SET, FASTER, ATTENTION, MEMORY)
"""The questions of a user that the claims answer, in the order of the page."""

HEADLINE = ("W-match", "W-degrade", "W-identity", "S-losses", "S-long")
"""The claims that matter most."""

LEARNED = "Softmax has learned the task, at or above a stated accuracy, in every setting that is compared."
TRANSLATES = (
    f"Softmax translates, with a BLEU of at least {BLEU_BAR:g}, and loss and BLEU do not contradict each other."
)
PREDICTS = (
    "Softmax predicts text at least 2.5 nats per token better than a uniform guess over the vocabulary, and without "
    "attention the loss is at least 0.1 nats higher than with relu/L."
)
NO_PREMISE = "None: nothing is trained for it."
NO_TABLE = "The paper shows curves and gives no numbers"


@dataclass(frozen=True)
class Claim:
    """A sentence that a study can reproduce or contradict."""

    id: str
    sentence: str
    source: str
    group: str
    """One of GROUPS."""
    paper: str
    """The paper's own numbers, in words."""
    premise: str
    """The condition for a verdict, in words."""
    figure: str = ""
    """The figure that shows it, if it is not the first of its study."""


CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "W-match",
            "relu/L approaches or matches softmax in how accuracy scales with compute.",
            f"{VISION}, abstract and Fig. 1",
            MATCH,
            f"{NO_TABLE}: for five models from S/32 to L/16 on ImageNet-21k both lie on one line, between 68 and 82 %.",
            LEARNED,
        ),
        Claim(
            "W-transfer",
            "The same holds for 10-shot transfer.",
            f"{VISION}, Fig. 1 right",
            MATCH,
            f"{NO_TABLE}: averages over eight data sets on one line, between 72 and 84 %.",
            LEARNED,
        ),
        Claim(
            "W-degrade",
            "Without length scaling accuracy degrades.",
            f"{VISION}, abstract and Fig. 2",
            SET,
            f"{NO_TABLE}: S/32, S/16 and S/8 (49, 196 and 784 tokens), accuracies between 65 and 80 %.",
            LEARNED,
        ),
        Claim(
            "W-alpha",
            "The best α is close to 1, for every h and every length.",
            f"{VISION}, Fig. 2",
            SET,
            "α ≈ 1 is best for seven h, two data sets and three lengths.",
            LEARNED,
        ),
        Claim(
            "W-h",
            "No h clearly wins at α ≈ 1.",
            f"{VISION}, Fig. 2",
            SET,
            f"{NO_TABLE}: the best of seven h changes with the length and the data.",
            LEARNED,
        ),
        Claim(
            "W-identity",
            "Removing the nonlinearity costs accuracy.",
            f"{VISION}, Sec. 3",
            SET,
            "Said without a number.",
            LEARNED,
        ),
        Claim(
            "W-init",
            "At initialisation the mean weight is O(1/L) for α = 1.",
            f"{VISION}, Sec. 3",
            SET,
            "An argument: the mean weight of softmax is 1/L, and that of relu/L is a constant times 1/L.",
            NO_PREMISE,
            "init",
        ),
        Claim(
            "W-qknorm",
            "qk-layernorm has no large effect at these sizes.",
            f"{VISION}, Fig. 3",
            SET,
            f"{NO_TABLE}: with and without it, relu and relu² lie close together, between 64 and 76 %.",
            LEARNED,
        ),
        Claim(
            "W-gate",
            "A gate does not remove the need for length scaling.",
            f"{VISION}, Fig. 4",
            SET,
            f"{NO_TABLE}: with a gate, too, the best accuracy is at α ≈ 1.",
            f"{LEARNED} Without a gate, length scaling is needed.",
        ),
        Claim(
            "W-gatecost",
            "The gate costs about 9 % more core-hours (9.3 % for S/8 with relu).",
            f"{VISION}, Sec. 4",
            FASTER,
            "9.3 % more core-hours for S/8 with relu.",
            NO_PREMISE,
            "gate-cost",
        ),
        Claim(
            "W-parallel",
            "relu/L can be parallelised over the sequence with fewer gathers than softmax.",
            f"{VISION}, caption of Fig. 1",
            FASTER,
            "Said without a number or a measurement.",
            NO_PREMISE,
            "sequence-parallel",
        ),
        Claim(
            "S-speed",
            "ReLUFormer is as fast as softmax, and about 1.7 times as fast as sparsemax and 1.5-entmax.",
            f"{TEXT}, Sec. 4",
            FASTER,
            "1.7 times as fast as sparsemax and 1.5-entmax, on a par with softmax, on a GPU.",
            NO_PREMISE,
            "speed",
        ),
        Claim(
            "S-losses",
            "With the two losses it matches or beats softmax, and without the normalisation loss it falls back.",
            f"{TEXT}, Sec. 4",
            ATTENTION,
            "BLEU 34.22 with softmax, 33.19 with the factor alone, 34.56 with both losses; 1.37 less without the "
            "normalisation loss.",
            TRANSLATES,
        ),
        Claim(
            "S-factor",
            "With the variance factor alone ReLU attention converges, but trails softmax.",
            f"{TEXT}, Sec. 4",
            ATTENTION,
            "BLEU 33.19 with the factor alone, 34.22 with softmax.",
            TRANSLATES,
        ),
        Claim(
            "S-diverge",
            "ReLU put into attention directly does not converge.",
            f"{TEXT}, Sec. 4",
            ATTENTION,
            "It diverges; no number.",
            TRANSLATES,
        ),
        Claim(
            "S-long",
            "The advantage of ReLUFormer grows with the length of documents: on par to 256 tokens, ahead from 512.",
            f"{TEXT}, Sec. 5",
            ATTENTION,
            "On a par at 128 and 256 tokens, ahead from 512, by 1.15 BLEU at 1,024.",
            "The models use the source: a wrong one costs them. Loss and BLEU do not contradict each other.",
        ),
        Claim(
            "S-distant",
            "ReLU attention keeps distant words, and spends less on commas and stop words.",
            f"{TEXT}, Sec. 5",
            ATTENTION,
            "Shown for single sentences, without a number.",
            "The models use the source: a wrong one costs them.",
            "documents-looks",
        ),
        Claim(
            "Q-text",
            "The vision paper's L^-1 carries over to text: the best α is close to 1.",
            OURS,
            ATTENTION,
            "Neither paper has it: one has α = 1 for images, the other α = ½ for text.",
            TRANSLATES,
        ),
        Claim(
            "Q-zeros",
            "Nine in ten weights of ReLU attention can be zero at no cost.",
            OURS,
            FASTER,
            "Neither paper asks; the second has ReLU attention with 94 % of its weights zero.",
            f"{PREDICTS} {LEARNED}",
        ),
        Claim(
            "Q-sparse",
            "Skipping blocks of zeros makes decoding with a long cache faster.",
            OURS,
            FASTER,
            "Neither paper asks. Half-space reporting promises it for random keys (Chen et al. 2024), without times.",
            PREDICTS,
            "zeros-speed",
        ),
        Claim(
            "S-softmax-ffn",
            "A softmax memory is worse than a ReLU feed-forward layer.",
            f"{TEXT}, Sec. 3",
            MEMORY,
            "BLEU 33.08 with softmax, 34.22 with ReLU.",
            TRANSLATES,
        ),
        Claim(
            "S-ln",
            "With LayerNorm on its output a softmax memory is as good as ReLU.",
            f"{TEXT}, Sec. 3",
            MEMORY,
            "BLEU 34.21 with softmax and LayerNorm, 34.22 with ReLU.",
            TRANSLATES,
        ),
        Claim(
            "S-slots",
            "With many slots ReLU is ahead of softmax, with or without LayerNorm.",
            f"{TEXT}, Sec. 3",
            MEMORY,
            "At 3,072 and 4,096 slots ReLU is ahead of both; the differences are in a figure.",
            TRANSLATES,
        ),
        Claim(
            "S-central",
            "A softmax memory centralises: the largest 0.2 % of its weights hold most of their sum.",
            f"{TEXT}, Sec. 3",
            MEMORY,
            "The largest 0.2 % of the weights hold more than 85 % of their sum.",
            TRANSLATES,
            "memory-inside",
        ),
        Claim(
            "S-variance",
            "The output of a softmax memory has a small variance beside the residual's, that of ReLU has not.",
            f"{TEXT}, Sec. 3",
            MEMORY,
            "Ratios of variances, in a figure.",
            TRANSLATES,
            "memory-inside",
        ),
    )
}
