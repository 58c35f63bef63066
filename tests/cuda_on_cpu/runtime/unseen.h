// Hides the emulation's own locks from ThreadSanitizer, so that it sees only the order that CUDA
// promises: an internal lock that two streams share would otherwise look like an event between
// them.
#pragma once

#include <cstdlib>
#include <mutex>

#ifdef __SANITIZE_THREAD__
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace cuda_on_cpu {

#ifdef __SANITIZE_THREAD__

// False with CUDA_ON_CPU_SEEN=1: ThreadSanitizer then checks the emulation itself.
[[nodiscard]] inline bool hiding() {
  static const bool kHiding = [] {
    const char* seen = std::getenv("CUDA_ON_CPU_SEEN");
    return seen == nullptr || *seen != '1';
  }();
  return kHiding;
}

inline void unseen_begin() {
  if (!hiding()) return;
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void unseen_end() {
  if (!hiding()) return;
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}
// What this thread did so far happens before what a thread does after acquire(token).
inline void release(void* token) {
  __tsan_release(token);
}
inline void acquire(void* token) {
  __tsan_acquire(token);
}

#else

inline void unseen_begin() {}
inline void unseen_end() {}
inline void release(void*) {}
inline void acquire(void*) {}

#endif

// While it lives, nothing that this thread does is seen. Nests.
class Unseen {
 public:
  Unseen() { unseen_begin(); }
  ~Unseen() { unseen_end(); }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

// Within one Unseen (not two): what the thread does is seen, as it is the program's own.
class Seen {
 public:
  Seen() { unseen_end(); }
  ~Seen() { unseen_begin(); }
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;
};

// A lock that is unseen together with all that is done under it.
class UnseenLock {
 public:
  explicit UnseenLock(std::mutex& mutex) : lock_(mutex) {}
  [[nodiscard]] std::unique_lock<std::mutex>& lock() { return lock_; }

 private:
  Unseen unseen_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace cuda_on_cpu
