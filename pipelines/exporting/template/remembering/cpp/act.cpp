// Acts with model.pt2, which remembers: prints an action for each observation of an episode, and the time of a decision to stderr.
//
//     ./act ../model.pt2 OBSERVATION...
//
// Observations follow each other: here the action at each is executed, and the reward is 0.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <iostream>
#include <vector>

constexpr int64_t kObservation = $observation_dim, kAction = $action_dim, kRemembered = $remembered_steps;

class Policy {
 public:
  explicit Policy(const std::string& package) : package_(package) {}

  // The action to execute now, in the environment's units.
  at::Tensor act(std::vector<float> observation) {
    c10::InferenceMode no_gradients;
    observations_ = pushed(observations_, at::from_blob(observation.data(), {1, 1, kObservation}));
    return package_.run({observations_, actions_, returns_, step_})[0][0][0].contiguous();  // of the actions (1, 1, A)
  }

  // What happened then: the action that was executed, and the reward of the step.
  void executed(const at::Tensor& action, float reward) {
    c10::InferenceMode no_gradients;
    actions_ = pushed(actions_, action.view({1, 1, kAction})), step_ = step_ + 1;
    returns_ = pushed(returns_, returns_.narrow(1, kRemembered, 1) + reward);
  }

 private:
  static at::Tensor pushed(at::Tensor past, at::Tensor last) { return at::cat({past.slice(1, 1), last}, 1); }

  torch::inductor::AOTIModelPackageLoader package_;
  at::Tensor observations_ = at::zeros({1, kRemembered + 1, kObservation}), actions_ = at::zeros({1, kRemembered, kAction}),
             returns_ = at::zeros({1, kRemembered + 1}), step_ = at::zeros({1}, at::kLong);
};

int main(int count, char** arguments) {
  if (count < 2 + kObservation || (count - 2) % kObservation) {
    std::cerr << "usage: " << arguments[0] << " PACKAGE, then " << kObservation << " numbers of each observation\n";
    return 2;
  }
  at::set_num_threads(1);
  std::cout.precision(9);
  Policy policy(arguments[1]);
  auto start = std::chrono::steady_clock::now();
  for (int i = 2; i < count; i += kObservation) {
    std::vector<float> observation;
    for (int64_t j = 0; j < kObservation; j++) observation.push_back(std::stof(arguments[i + j]));
    at::Tensor action = policy.act(observation);
    for (int64_t j = 0; j < kAction; j++) std::cout << action.data_ptr<float>()[j] << "\n";
    policy.executed(action, 0);
  }
  std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  std::cerr << spent.count() * kObservation / (count - 2) << " ms a decision\n";
}
