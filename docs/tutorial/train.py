"""Make data, train the classifier for a minute, and write what asapc needs."""

import numpy as np
import torch
from my_model import build
from safetensors.torch import save_file

WORDS, CLASSES, LENGTH = 200, 4, 256
random = np.random.default_rng(0)
topics = random.dirichlet(np.full(WORDS - 1, 0.5), CLASSES)  # of each class, how often a word comes
topics = 0.25 * topics + 0.75 * topics.mean(0)  # most words are of no topic


def texts(count, length):
    """Padded texts [count, length] of half the length at least, 0 where there is no word; their classes."""
    labels = random.integers(0, CLASSES, count)
    tokens = np.stack([random.choice(WORDS - 1, length, p=topics[c]) + 1 for c in labels])
    tokens[np.arange(length) >= random.integers(length // 2, length + 1, (count, 1))] = 0
    return tokens, labels


model = build()
optimiser = torch.optim.Adam(model.parameters(), 3e-3)
for step in range(240):
    tokens, labels = map(torch.from_numpy, texts(32, 64))
    loss = torch.nn.functional.cross_entropy(model(tokens), labels)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 80 == 79:
        print(f"step {step + 1}: loss {loss.item():.2f}")

save_file(model.state_dict(), "my.safetensors")
for name, count in (("my.npz", 1024), ("test.npz", 512)):
    tokens, labels = texts(count, LENGTH)
    np.savez(name, tokens=tokens, labels=labels)  # labels: for accuracy only
