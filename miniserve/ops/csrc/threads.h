// One pool of threads that blocks.
//
// A loop is cut into tasks; whoever is free takes the next, and the loop is over when all tasks are done, not
// when all threads have looked: a helper that sleeps, or whose core is busy elsewhere, holds nobody up.
// Helpers spin for some microseconds after a task, because the next loop usually follows at once, and then sleep:
// a waiting pool must not take a core from another engine or from torch. While one caller uses the pool,
// another caller runs its loop by itself.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace miniserve {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    try {
      for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {  // the system grants no more threads: fewer do the same work
    }
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  // Run body(task) for task = 0 .. num_tasks - 1; returns when all are done.
  template <class Body>
  void parallel_for(long num_tasks, const Body& body) {
    if (num_tasks <= 1 || helpers_.empty() || !in_use_.try_lock()) {
      for (long task = 0; task < num_tasks; ++task) body(task);
      return;
    }
    run_ = [](const void* context, long task) { (*static_cast<const Body*>(context))(task); };
    context_ = &body;
    num_tasks_ = num_tasks;
    done_.store(0);
    left_.store(num_tasks);  // from here on helpers take tasks
    if (num_sleeping_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    while (take_task()) continue;
    for (long spin = 0; done_.load(std::memory_order_acquire) != num_tasks; ++spin)
      spin < 1000 ? pause() : std::this_thread::yield();
    in_use_.unlock();
  }

 private:
  // Take one task and run it; false if none is left. Who holds a task knows that its loop is still open, since
  // the loop waits for that task, so `run_` and `context_` are that loop's.
  bool take_task() {
    long left = left_.load(std::memory_order_acquire);
    while (left > 0 && !left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) continue;
    if (left <= 0) return false;
    run_(context_, num_tasks_ - left);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void help() {
    typedef std::chrono::steady_clock Clock;
    for (Clock::time_point idle_since = Clock::now();;) {
      if (take_task()) {
        idle_since = Clock::now();
      } else if (Clock::now() - idle_since < std::chrono::microseconds(50)) {
        for (int i = 0; i < 8; ++i) pause();
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, [this] { return closing_ || left_.load() > 0; });
        num_sleeping_.fetch_sub(1);
        if (closing_) return;
        idle_since = Clock::now();
      }
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  std::vector<std::thread> helpers_;
  std::mutex in_use_;  // held by the caller whose loop runs
  std::mutex sleep_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::atomic<int> num_sleeping_{0};
  std::atomic<long> left_{0}, done_{0};
  long num_tasks_ = 0;
  void (*run_)(const void*, long) = nullptr;
  const void* context_ = nullptr;
};

}  // namespace miniserve
