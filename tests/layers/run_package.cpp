// Runs a packaged graph network on inputs that it makes, and prints the sum of the squares of the output.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <ATen/ATen.h>

#include <iostream>

int main(int, char** arguments) {
  c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
  auto x = at::arange(77, at::kFloat).reshape({11, 7}).sin();
  auto edges = at::arange(40).remainder(11).reshape({2, 20});
  auto out = loader.run({x, edges});
  std::cout.precision(9);
  std::cout << out.at(0).square().sum().item<double>() << std::endl;
}
