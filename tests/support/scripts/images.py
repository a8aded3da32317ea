"""A convolutional network: loaders with workers, batch norm, a scheduler, accuracy, a ragged last batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.two, self.norm_two = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
        self.drop, self.flat, self.head = nn.Dropout2d(0.25), nn.Linear(16 * 16, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm_one(self.one(x))), 2)
        x = self.drop(F.adaptive_avg_pool2d(F.relu(self.norm_two(self.two(x))), 4))
        return F.log_softmax(self.head(F.relu(self.flat(torch.flatten(x, 1)))), dim=1)


def accuracy(output, target, topk=(1, 3)):
    with torch.no_grad():
        _, predicted = output.topk(max(topk), 1, True, True)
        correct = predicted.t().eq(target.view(1, -1).expand_as(predicted.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)
    x = torch.randn(100, 1, 16, 16)
    y = (x.mean((1, 2, 3)) * 100).long().clamp(-4, 5) + 4
    train = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True, num_workers=2)
    test = DataLoader(TensorDataset(x, y), batch_size=50)
    with torch.device("meta"):
        print(torch.tensor([1.0]).device, torch.asarray([1.0]).device, torch.ones(1).device)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    criterion = nn.NLLLoss()
    for epoch in range(2):
        model.train()
        running = 0.0
        for i, (images, target) in enumerate(train):
            output = model(images)
            loss = criterion(output, target)
            one, three = accuracy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item() * images.size(0)
            norm = model.flat.weight.norm().item()
            print(f"{epoch} {i} {loss.item():.17g} {one.item():.4f} {three[0].item():.4f} {norm:.17g}")
        model.eval()
        total = correct = 0
        with torch.no_grad():
            for images, target in test:
                output = model(images)
                total += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(1, keepdim=True).eq(target.view(-1, 1)).sum().item()
        print(f"{running:.17g} {total:.17g} {correct} {scheduler.get_last_lr()}")
        scheduler.step()
    torch.save(model.state_dict(), "images.pt")
