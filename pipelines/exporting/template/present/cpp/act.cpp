// Acts with model.pt2: prints the action at one observation, one number a line, and the time of a decision to stderr.
//
//     ./act ../model.pt2 GENERATOR OBSERVATION...
//
// GENERATOR is the seed of the random numbers that a plan is searched with; sample.json has one, and what to expect.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <iostream>
#include <random>
#include <string>
#include <vector>

constexpr int64_t kObservation = $observation_dim, kNoise = $noise_size;

class Policy {
 public:
  Policy(const std::string& package, uint32_t generator) : package_(package), generator_(generator) {}

  // The action to execute now, in the environment's units. Each decision draws new random numbers.
  std::vector<float> act(std::vector<float> observation) {
    c10::InferenceMode no_gradients;
    std::vector<at::Tensor> inputs{at::from_blob(observation.data(), {1, kObservation}).clone()};
    if (kNoise > 0) {
      std::vector<float> noise(kNoise);
      for (float& number : noise) number = (generator_() % (1 << 24)) / float(1 << 24);  // uniform in [0, 1)
      inputs.push_back(at::from_blob(noise.data(), {1, kNoise}).clone());
    }
    at::Tensor action = package_.run(inputs)[0][0][0].contiguous();  // of the actions (1, H, A), the first
    return {action.data_ptr<float>(), action.data_ptr<float>() + action.numel()};
  }

 private:
  torch::inductor::AOTIModelPackageLoader package_;
  std::mt19937 generator_;
};

int main(int count, char** arguments) {
  if (count != 3 + kObservation) {
    std::cerr << "usage: " << arguments[0] << " PACKAGE GENERATOR, then " << kObservation << " numbers of an observation\n";
    return 2;
  }
  at::set_num_threads(1);
  std::cout.precision(9);
  std::vector<float> observation;
  for (int i = 3; i < count; i++) observation.push_back(std::stof(arguments[i]));
  Policy policy(arguments[1], std::stoul(arguments[2]));
  for (float number : policy.act(observation)) std::cout << number << "\n";
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; i++) policy.act(observation);
  std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  std::cerr << spent.count() / 100 << " ms a decision\n";
}
