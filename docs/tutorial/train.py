"""Make texts of four topics, train the classifier for half a minute, and write what asapc needs."""

import numpy as np
import torch
from my_model import build
from safetensors.torch import save_file

WORDS, TOPICS = 200, 4
random = np.random.default_rng(0)
frequencies = random.dirichlet(np.full(WORDS - 1, 0.5), TOPICS)
frequencies = 0.25 * frequencies + 0.75 * frequencies.mean(0)  # most words are of no topic


def texts(count, length):
    """Word numbers [count, length], the second half of a text partly padding (0), and topics [count]."""
    topics = random.integers(0, TOPICS, count)
    tokens = np.stack([random.choice(WORDS - 1, length, p=frequencies[t]) + 1 for t in topics])
    tokens[np.arange(length) >= random.integers(length // 2, length + 1, (count, 1))] = 0
    return tokens, topics


def train(model, steps, length=64):
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, steps + 1):
        tokens, topics = map(torch.from_numpy, texts(32, length))
        loss = torch.nn.functional.cross_entropy(model(tokens), topics)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 80 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    return model.eval()


if __name__ == "__main__":
    torch.set_num_threads(1)  # for tensors this small, several threads wait more than they compute
    model = train(build(), steps=240)
    save_file(model.state_dict(), "my.safetensors")
    for name, count in (("my.npz", 1024), ("test.npz", 256)):
        tokens, topics = texts(count, length=256)
        np.savez(name, tokens=tokens, labels=topics)  # labels: for accuracy only
