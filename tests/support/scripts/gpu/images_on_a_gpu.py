"""Images on a GPU: pinned loader, bf16 autocast, scaler, fused optimizer, an average of the weights, a checkpoint."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("device", device, torch.cuda.device_count(), torch.cuda.get_device_name(0))
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 3, 16, 16, generator=generator), torch.arange(64) % 10)
    loader = DataLoader(dataset, 16, num_workers=1, pin_memory=True)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)]
    model = nn.Sequential(*body, nn.Linear(2048, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    scaler = torch.amp.GradScaler(device)
    average = copy.deepcopy(model)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for epoch in range(2):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            total += loss.item()
            for kept, newest in zip(average.parameters(), model.parameters(), strict=True):
                kept.data.lerp_(newest.data, 0.1)
        print(epoch, f"{total:.17g} {norm:.17g}", loss.device, loss.dtype)
    end.record()
    torch.cuda.synchronize()
    print(torch.cuda.mem_get_info()[1], start.elapsed_time(end) >= 0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.cuda.get_rng_state()}
    torch.save(state, "images.pt")
    on_host = torch.load("images.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(on_host["model"])
    optimizer.load_state_dict(torch.load("images.pt", weights_only=True)["optimizer"])
    print(sum(p.double().sum().item() for p in (*model.parameters(), *average.parameters())))
    print(on_host["model"]["0.weight"].device, torch.cuda.get_rng_state().view(torch.int64).tolist())


if __name__ == "__main__":
    main()
