"""accelerate: a prepared model, accumulate, clipping, a scheduler, metrics over all batches, saved state and resume."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    x = torch.randn(70, 10)
    y = x[:, :3].argmax(1)
    train = DataLoader(TensorDataset(x, y), shuffle=True, batch_size=8)
    valid = DataLoader(TensorDataset(x, y), batch_size=32)
    body = [nn.Linear(10, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.GELU()]
    model = nn.Sequential(*body, nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, epochs=3, steps_per_epoch=len(train))
    model, optimizer, train, valid, schedule = accelerator.prepare(model, optimizer, train, valid, schedule)
    for epoch in range(3):
        model.train()
        total = 0
        for features, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), labels)
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = count = 0
        for features, labels in valid:
            with torch.no_grad():
                predictions = model(features).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == labels).long().sum().item()
            count += len(labels)
        accelerator.print(f"{epoch} {total.item():.17g} {right}/{count} {schedule.get_last_lr()[0]:.17g}")
        accelerator.save_state(f"epoch_{epoch}")
        if epoch == 1:
            accelerator.load_state("epoch_0")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerated.pt")


if __name__ == "__main__":
    main()
