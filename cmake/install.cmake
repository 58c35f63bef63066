# zero::zero for find_package(zero).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS zero EXPORT zero_targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/zero DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(zero_package ${CMAKE_INSTALL_LIBDIR}/cmake/zero)
install(EXPORT zero_targets NAMESPACE zero:: FILE zeroTargets.cmake DESTINATION ${zero_package})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/zeroConfig.cmake.in
  ${PROJECT_BINARY_DIR}/zeroConfig.cmake INSTALL_DESTINATION ${zero_package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/zeroConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/zeroConfig.cmake ${PROJECT_BINARY_DIR}/zeroConfigVersion.cmake
  DESTINATION ${zero_package})
