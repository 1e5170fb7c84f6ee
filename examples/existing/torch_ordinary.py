"""An ordinary PyTorch script: digits, mini-batches, a batch loss."""

import numpy as np
import torch
from sklearn import datasets, model_selection
from torch.utils.data import DataLoader, TensorDataset

images, labels = datasets.load_digits(return_X_y=True)
split = model_selection.train_test_split(np.float32(images / 16), labels, random_state=0)
train_x, test_x, train_y, test_y = map(torch.tensor, split)
BATCH, EPOCHS = 200, 20

model = torch.nn.Sequential(
  torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loader = DataLoader(TensorDataset(train_x, train_y), BATCH, shuffle=True, drop_last=True)
loss_fn = torch.nn.CrossEntropyLoss()

for _ in range(EPOCHS):
  for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
print(f"accuracy {(model(test_x).argmax(-1) == test_y).float().mean():.3f}")
