"""In the style of torchvision's references: metric loggers, label smoothing, a warm-up, weight averages, resume."""

import argparse
import datetime
import math
import time
from collections import defaultdict, deque

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SmoothedValue:
    def __init__(self, window_size=20, fmt="{median:.6f} ({global_avg:.6f})"):
        self.deque = deque(maxlen=window_size)
        self.total, self.count, self.fmt = 0.0, 0, fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, value=self.deque[-1])


class MetricLogger:
    def __init__(self, delimiter="  "):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters[k].update(v)

    def __getattr__(self, attr):
        if attr in self.meters:
            return self.meters[attr]
        return object.__getattribute__(self, attr)

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter!s}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        start = time.time()
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0:
                print(f"{header} [{i}/{len(iterable)}] {self!s}")
        elapsed = datetime.timedelta(seconds=int(time.time() - start))
        assert elapsed.seconds < 1000


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


class Block(nn.Module):
    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += identity
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        maxk, batch_size = max(topk), target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / batch_size) for k in topk]


def set_weight_decay(model, weight_decay, norm_weight_decay):
    groups = {"other": [], "norm": []}
    for module in model.modules():
        norm = isinstance(module, nn.BatchNorm2d)
        groups["norm" if norm else "other"] += [p for p in module.parameters(recurse=False) if p.requires_grad]
    decays = {"other": weight_decay, "norm": norm_weight_decay}
    return [{"params": groups[k], "weight_decay": decays[k]} for k in groups if groups[k]]


def train_one_epoch(model, criterion, optimizer, loader, epoch, args, model_ema, scaler):
    model.train()
    logger = MetricLogger()
    logger.meters["lr"] = SmoothedValue(window_size=1, fmt="{value}")
    for i, (image, target) in enumerate(logger.log_every(loader, args.print_freq, f"Epoch: [{epoch}]")):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
        if model_ema and i % args.ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.warmup_epochs:
                model_ema.n_averaged.fill_(0)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        batch_size = image.shape[0]
        logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        logger.meters["acc1"].update(acc1.item(), n=batch_size)
        logger.meters["acc5"].update(acc5.item(), n=batch_size)


def evaluate(model, criterion, loader, suffix=""):
    model.eval()
    logger = MetricLogger()
    with torch.inference_mode():
        for image, target in logger.log_every(loader, 100, f"Test: {suffix}"):
            output = model(image)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            logger.update(loss=loss.item())
            logger.meters["acc1"].update(acc1.item(), n=image.shape[0])
            logger.meters["acc5"].update(acc5.item(), n=image.shape[0])
    print(f"Test: {suffix} Acc@1 {logger.acc1.global_avg:.17g} Acc@5 {logger.acc5.global_avg:.17g} loss {logger.loss}")


def main(args):
    torch.manual_seed(5)
    torch.set_num_threads(1)
    images = torch.randn(90, 3, 16, 16)
    labels = (images.mean((1, 2, 3)) * 120).long().clamp(-5, 4) + 5
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(images, labels), batch_size=32)
    model = ResNet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    parameters = set_weight_decay(model, 1e-3, 0.0)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if args.scaler else None
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=args.warmup_epochs)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=args.epochs - args.warmup_epochs, eta_min=1e-4)
    scheduler = schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[args.warmup_epochs])
    alpha = min(1.0, (1.0 - args.ema_decay) * 16 * args.ema_steps / args.epochs)
    model_ema = ExponentialMovingAverage(model, decay=1.0 - alpha)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        if scaler:
            scaler.load_state_dict(checkpoint["scaler"])
        start = checkpoint["epoch"] + 1
    for epoch in range(start, args.epochs):
        train_one_epoch(model, criterion, optimizer, loader, epoch, args, model_ema, scaler)
        scheduler.step()
        evaluate(model, criterion, test)
        evaluate(model_ema, criterion, test, suffix="EMA")
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "model_ema": model_ema.state_dict(),
            "epoch": epoch,
        }
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        torch.save(checkpoint, f"vision_{epoch}.pt")
    assert not math.isnan(next(model.parameters()).sum().item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--clip-grad-norm", type=float)
    parser.add_argument("--ema-steps", type=int, default=2)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    parser.add_argument("--print-freq", type=int, default=2)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--resume")
    main(parser.parse_args())
