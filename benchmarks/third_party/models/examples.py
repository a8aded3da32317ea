"""Models of dlrm and pytorch/examples: unmodified code, each small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import definitions, repository

# model: its batches and its loss
MODELS = {
    "dlrm": ("dlrm_batches", "torch.nn.functional:binary_cross_entropy"),
    "dcgan_d": ("dcgan_d_batches", "torch.nn.functional:binary_cross_entropy"),
    "fast_neural_style": ("fast_neural_style_batches", "torch.nn.functional:mse_loss"),
    "gcn": ("gcn_batches", "torch.nn.functional:nll_loss", "--num-microbatches 1"),
    "mnist_rnn": ("mnist_rnn_batches", "torch.nn.functional:nll_loss"),
    "siamese": ("siamese_batches", "siamese_loss"),
    "time_sequence": ("time_sequence_batches", "torch.nn.functional:mse_loss"),
    "vae": ("vae_batches", "vae_loss"),
    "word_lstm": ("word_lstm_batches", "word_lstm_loss"),
    "word_transformer": ("word_transformer_batches", "word_transformer_loss"),
}


def dlrm_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        sparse = torch.stack([torch.randint(0, n, (batch_size,), generator=g) for n in (20, 30, 40)])
        offsets = torch.arange(batch_size).repeat(3, 1)
        yield (
            (torch.randn(batch_size, 4, generator=g), offsets, sparse),
            torch.randint(0, 2, (batch_size, 1), generator=g).float(),
        )


def dcgan_d_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 3, 64, 64, generator=g), torch.randint(0, 2, (batch_size,), generator=g).float())


def fast_neural_style_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.rand(batch_size, 3, 32, 32, generator=g)
        yield (x, x)


def gcn_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    adj = (torch.rand(16, 16, generator=g) < 0.3).float() + torch.eye(16)
    for _ in range(4):
        yield ((torch.randn(16, 12, generator=g), adj), torch.randint(0, 4, (16,), generator=g))


def mnist_rnn_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (torch.randn(batch_size, 1, 28, 28, generator=g), torch.randint(0, 10, (batch_size,), generator=g))


def siamese_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        a, b = torch.rand(2, batch_size, 1, 28, 28, generator=g)
        yield ((a, b), torch.randint(0, 2, (batch_size,), generator=g).float())


def time_sequence_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.rand(batch_size, 9, generator=g, dtype=torch.double)
        yield (x[:, :-1], x[:, 1:])


def vae_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.rand(batch_size, 1, 28, 28, generator=g)
        yield (x, x)


def word_lstm_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 50, (12, batch_size), generator=g)
        yield ((ids[:-1], (torch.zeros(2, batch_size, 32), torch.zeros(2, batch_size, 32))), ids[1:])


def word_transformer_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 50, (12, batch_size), generator=g)
        yield (ids[:-1], ids[1:])


def siamese_loss(output, target):
    return F.binary_cross_entropy(output.squeeze(1), target)


def vae_loss(output, target):
    script = definitions("examples/vae/main.py", "vae_script")
    return script.loss_function(output[0], target, output[1], output[2])


def word_lstm_loss(output, target):
    return F.nll_loss(output[0].reshape(-1, 50), target.flatten())


def word_transformer_loss(output, target):
    return F.nll_loss(output.reshape(-1, 50), target.flatten())


def dlrm():
    repository("dlrm")
    import numpy as np
    from dlrm_s_pytorch import DLRM_Net

    return DLRM_Net(
        8,
        np.array([20, 30, 40]),
        np.array([4, 16, 8]),
        np.array([8 + 6, 16, 1]),
        arch_interaction_op="dot",
        sigmoid_bot=-1,
        sigmoid_top=1,
    )


def dcgan_d():
    script = definitions("examples/dcgan/main.py", "dcgan_script", nz=20, ngf=8, ndf=8, nc=3, ngpu=1)
    net = script.Discriminator(1)
    net.apply(script.weights_init)
    return net


def fast_neural_style():
    repository("examples/fast_neural_style/neural_style")
    from transformer_net import TransformerNet

    return TransformerNet()


def gcn():
    repository("examples/gcn")
    from main import GCN

    return GCN(12, 16, 4)


def mnist_rnn():
    repository("examples/mnist_rnn")
    from main import Net

    return Net()


def siamese():
    repository("examples/siamese_network")
    from main import SiameseNetwork

    return SiameseNetwork()


def time_sequence():
    repository("examples/time_sequence_prediction")
    from train import Sequence

    return Sequence().double()


def vae():
    return definitions("examples/vae/main.py", "vae_script").VAE()


def word_lstm():
    repository("examples/word_language_model")
    from model import RNNModel

    return RNNModel("LSTM", 50, 32, 32, 2, dropout=0.2, tie_weights=True)


def word_transformer():
    repository("examples/word_language_model")
    from model import TransformerModel

    return TransformerModel(50, 32, 2, 64, 2, dropout=0.0)
